"""Pages of this server for people, and the rules that keep other pages in their browsers away from it."""
