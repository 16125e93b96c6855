"""What the training loop stands on. Nothing here imports model.py, data.py, tracking or tools."""
