"""What tests share: tiny models, references, and stand-ins for hardware and terminals."""
