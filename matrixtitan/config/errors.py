"""The error of a mistake in a config."""


class ConfigError(ValueError):
    """A mistake in a config file or an override; names the key, where it stands, what to change."""
