"""The methods of decoding beside each other on one prompt."""
