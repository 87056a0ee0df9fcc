"""Who is in a job whose ranks come and go, as state machines without I/O, clock or thread.

changes       announced changes: joining, leaving
death         what a death record says
decider       the rebalancer's side: halts, death records, who is ready, who serves
hearing       what a member hears and says: records, orders, reports, halting
known         what the rebalancer knows of the members, and whom it may count on
ledger        the records in the store, one behind the other
member        a member's side: steps, votes, what a record means
rebalancer    the rebalancer core that goes from one membership's run to the next
service       the driver of all that in the rebalancer's process
rows          the rows that a membership begins with: pure functions
take_up       a job that the store does not know
types         small records and limits
"""
