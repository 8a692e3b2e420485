"""Where a run is sent besides its folder."""
