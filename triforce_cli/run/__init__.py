"""A request over one loaded engine: generate, verify, plan, calibrate."""
