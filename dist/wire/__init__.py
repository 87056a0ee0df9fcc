"""What goes over a socket: addresses, keys, links and messages."""
