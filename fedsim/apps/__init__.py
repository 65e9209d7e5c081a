"""Flower's two apps of a federation: the server's and the client's."""
