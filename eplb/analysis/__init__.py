"""What inspect, replay and advise say about loads.

history    what there was: loads, balancedness and placements over time
facts      the figures of one source that inspect shows
inspection what inspect finds in several sources, between two, and with a plan
replay     what other settings would have given
advice     is EPLB worth it here, and the reasons
batches   what redundancy and the deal are worth at a batch size
measures   the numbers that advice stands on
"""
