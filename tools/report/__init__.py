"""Text, pages and pictures that commands print or write.

advice     the text of `evenroute advise`: the verdict first, then its reasons as numbers
facts      the facts that `evenroute inspect` shows: of each source, or of the difference between two
page       the page of `evenroute inspect --html`: one file, no network, heatmaps drawn on canvas
pictures   pictures of a history: the page of `--html` and the image of `--png`
replay     the table of `evenroute replay`
text       text tables of `evenroute inspect`, sized to the terminal
top        the screen of `evenroute top`: one status, and what top itself has seen change
words      words and figures as all commands show them
"""
