"""Bringing reports to the controller."""
