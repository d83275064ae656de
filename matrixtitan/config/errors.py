"""The error for a mistake in a config."""


class ConfigError(ValueError):
    """A mistake in a config file or an override. Names the key, where it stands, what to change."""
