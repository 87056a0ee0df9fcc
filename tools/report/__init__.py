"""Text, pages and pictures that commands print or write.

text       tables of inspect
detail     its tables of one layer and of a difference
words      figures and names as all commands show them
page       the page of --html, without its data in page.html
pictures   its data, and --png
advice     the text of advise
replay     the table of replay
top        the screen of top
top_tables its layers, ranks and maps
keys       single keys from a terminal
"""
