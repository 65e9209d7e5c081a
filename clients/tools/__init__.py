"""What client parts of several slots use: losses, second networks and second optimizers."""
