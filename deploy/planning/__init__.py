"""What a run of n servers and m ranks would do, from measured rates, before the hardware is rented."""
