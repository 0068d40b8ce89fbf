"""Errors that a person is meant to read: one line with the cause and the remedy.

The commands print the line and exit with the class's code; nobody sees a traceback.
"""

from __future__ import annotations


class ExpanseError(Exception):
    """Something that the user or the operator can put right."""

    exit_code = 1


class ConfigError(ExpanseError):
    """A flag, an environment variable or a line of the configuration file is wrong."""

    exit_code = 2


class UnavailableError(ExpanseError):
    """This node, or this user, cannot do what was asked; the rest goes on without it."""


class UnknownJobError(ExpanseError):
    """No job has the key that was given."""

    exit_code = 3
