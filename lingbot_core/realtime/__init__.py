"""Worlds over sockets: the messages, the servers that answer them, and a client."""
