"""One client for every kind of server: routing, requests, health, weight updates."""
