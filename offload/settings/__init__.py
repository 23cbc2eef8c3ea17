"""What a user can choose, checked; methods and their sizes."""
