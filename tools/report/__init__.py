"""Text, pages and pictures that commands print or write."""
