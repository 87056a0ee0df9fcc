"""What inspect, replay and advise say about loads.

advice     is EPLB worth it here: a verdict, its reasons as numbers
facts      the facts that `evenroute inspect` shows, as plain values
history    one pass over a history of loads with bounded memory
measures   redundancy curves, how plans age, tokens that a plan needs
replay     a history through predictor, planner, migration delay and dispatch
"""
