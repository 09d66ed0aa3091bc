"""A deployment on paper: memory, bytes moved, the split over devices, launch scripts, the go-live list."""
