"""Every error radixkv raises to its callers. Trouble inside a tier is never one of them: it is a miss, counted."""

from __future__ import annotations


class RadixKVError(Exception):
    """Base class of all errors raised by radixkv."""


class OutOfPages(RadixKVError):
    """The device pool cannot give the pages asked for, not even by eviction. Ordinary control flow: nothing was
    changed.
    """


class InvalidTokens(RadixKVError, ValueError):
    """A token is not an integer in [0, 2**31), or a committed token contradicts the prompt. Names the position."""


class ConfigError(RadixKVError, ValueError):
    """A configuration value is outside its limits. Names the value and the limit."""


class StoreLocked(RadixKVError):
    """Another process (or another cache of this process) writes this store folder; or it was open when this process was
    forked, which cannot open it again then.
    """


class StoreFormat(RadixKVError):
    """The store folder was written by a format this version cannot read. It is left untouched."""


class WrongProcess(RadixKVError):
    """The cache was opened in another process; a forked child must open its own, on another store."""


class LeaseClosed(RadixKVError):
    """The lease was closed; its pages are no longer the caller's."""


class LeaseNotSettled(RadixKVError):
    """The lease still waits for outer tiers: drive it with ``poll`` or ``wait`` first."""


class InvariantError(RadixKVError, AssertionError):
    """``Cache.check`` found a broken invariant: a defect of radixkv, not of its caller."""
