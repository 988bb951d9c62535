"""The smallest input on which a kernel goes wrong."""
