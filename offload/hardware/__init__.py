"""What computes: profiles, data sheets, and what was measured on this machine."""
