"""Predictions, from measured rates, of a run with n servers and m ranks before the hardware is rented."""
