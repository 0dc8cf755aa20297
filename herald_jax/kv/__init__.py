"""Where keys and values live: the full pool in host memory, the sparse pools on the device."""
