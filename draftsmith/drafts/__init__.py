"""The networks of the family: configuration, backbone, heads, and the way in and out of directories."""
