"""What inspect, replay and advise say about loads.

advice     is EPLB worth it here? A verdict with its reasons as numbers
facts      the facts `evenroute inspect` shows
history    one pass over a history of loads with bounded memory
measures   what advice is made of: redundancy curves, how plans age, tokens a plan needs, what a finite
replay     replays a history of loads through predictor
"""
