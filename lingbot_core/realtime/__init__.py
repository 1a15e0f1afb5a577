"""Worlds over sockets: the published realtime protocols, inside ComfyUI and in a server of its own."""
