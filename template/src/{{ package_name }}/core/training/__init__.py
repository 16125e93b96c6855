"""Networks, optimizers, a step of the training, and how far it has come."""
