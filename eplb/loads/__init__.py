"""Expert loads: what balance they give on ranks, and windows of loads from any source.

balance    expert loads, what they put on slots and ranks, and balancedness
decoding   what readers of load files share
skew       how uneven expert loads are: small vectorised figures over `[L, E]`
source     what every load file reads into: a stream of windows
"""
