"""The version, for what must not wait for the whole package."""

__version__ = "0.1.0"
