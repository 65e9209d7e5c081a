"""What server parts of several slots use: clusters, masks and the moves of clients."""
