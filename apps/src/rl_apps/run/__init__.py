"""One run: app, trainer process, components, directory, summary."""
