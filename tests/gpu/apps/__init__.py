"""Apps, each imported by one process that checks something of it. Nothing here is imported by the runner."""
