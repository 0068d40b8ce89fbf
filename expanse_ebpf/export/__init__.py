"""The formats that others read."""
