"""What a layer is computed with: attention and its merge, linears, on each device."""
