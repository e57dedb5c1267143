"""Models: loading, packed forwards, and the embedded one."""
