"""APIs that agents may speak to the gateway, one module each: views of one conversation."""
