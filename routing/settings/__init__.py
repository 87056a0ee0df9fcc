"""What a router is built for, below all else of routing.

config: RouterConfig. modes: the table of dispatch modes. checks: tensors that callers hand in.
"""
