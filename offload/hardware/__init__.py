"""The hardware: profiles, data sheets, and measurements of this machine."""
