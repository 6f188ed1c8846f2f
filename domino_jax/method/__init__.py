"""The paper: blocks, backbone, heads, losses, schedule and step; drafting, verification and the decode loop."""
