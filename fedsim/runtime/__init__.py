"""Where clients run: in this process, on Ray workers, or on separate machines."""
