"""This process as a rank among others, and how ranks are started."""
