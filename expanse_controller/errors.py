"""Errors that a person is meant to read: one line with the cause and the remedy."""

from __future__ import annotations


class ControllerError(Exception):
    """Something that the operator can put right."""
