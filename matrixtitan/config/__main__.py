"""Print docs/configuration.md."""

from matrixtitan.config.show import markdown

if __name__ == "__main__":
    print(markdown(), end="")
