"""The rebalancer's HTTP port: a live page, a JSON API, metrics and health. A process of its own beside the daemon.

process   its process, seen from the rebalancer
child     the process itself
server    HTTP: bounded in peers, bytes and time
access    who may read what: the token, and names of this host
routes    the paths and their answers
answers   what the API answers: JSON of loads, placements, layers
history   loads over time, read out of the store
bins      spans of time that counts are summed in
metrics   Prometheus names
page.html is the page: one file, no network but this port
"""
