"""Measures the rendered project and the template side by side with their peers and limits."""
