"""Failures of the engine that a caller may want to tell apart."""


class EngineError(RuntimeError):
    """The engine cannot go on; the message is one sentence for the user."""


class WaitTimeout(EngineError):
    """A wait ran out of time; the message names what it waited for."""
