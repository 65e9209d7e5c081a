"""Provisioning of a federation on separate machines: its description, kits, certificates and checks."""
