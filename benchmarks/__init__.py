"""Compares the speed of the rendered project and of the template with others, and with limits."""
