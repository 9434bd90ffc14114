"""Weights in transit: layout, sending, checking, receiving. Imports torch."""
