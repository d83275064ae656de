"""The error for a mistake in a config."""


class ConfigError(ValueError):
    """A mistake in a config file or an override. Names the key, where it stands, what to change."""


def report(error: ValueError) -> str:
    """What a program prints for the error: a line for each problem."""
    return "\n".join(f"config error: {line}" for line in str(error).splitlines())
