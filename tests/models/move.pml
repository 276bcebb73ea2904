/* A staged block that gets a second slot, in device memory, while its flag lives on (shmring/flags.py), under a weak memory model.
 *
 * The daemon publishes the block with its host slot, copies it to the device slot, and writes that number into the slot table.  The
 * device slot stays the block's as long as the flag pins the block.  The daemon takes the flag back, may reuse the device slot then,
 * and publishes the flag again, in the device slot if the block is still there.  The engine takes the flag, polls, claims, reads the
 * entry, copies from the slot it names, un-claims or releases, and takes it again.  The host slot keeps the block as long as the flag
 * pins it (flag.pml), so only the device slot's content is modelled.  The exchange of the flag word itself is modelled as in flag.pml:
 * atomic, and no order beyond release.
 *
 * Memory model.  The daemon's plain stores (device memory, table entry) go through a store buffer and reach memory in any order; a
 * fence and a release wait until they did.  The engine's plain loads return the value at its last acquire or fence, or the present
 * one.
 *
 * Checked: a claimed request that finds the device slot's number finds its own block there until it gives the claim up; the flag
 * always comes back (an invalid end state otherwise).
 * Mutations, each of which must make the check fail: the names M_* below (tests/models/test_models.py).
 */
#ifndef GENERATIONS
#define GENERATIONS 4
#endif

#define FREE 0
#define HINTED 1
#define READY 2
#define CLAIMED 3
#define RELEASED 4
#define WORD(generation, state) ((generation) * 8 + (state))
#define GENERATION(word) ((word) / 8)
#define STATE(word) ((word) % 8)

#define HOST 1
#define DEVICE 2
#define OTHER 255 /* another request's data */

/* memory: flag, the block's entry, the content of the device slot (the generation whose block it is) */
byte flag, entry, device = OTHER;
/* the daemon's store buffer */
byte v_entry, v_device;
bool b_entry, b_device;
/* memory as the engine's last acquire or fence left it */
byte e_entry, e_device;
bool locked; /* the daemon's exchange has the word; only the daemon's later stores can overtake it */

#define DRAINED (!b_entry && !b_device)
#define STORE_ENTRY(value) atomic { v_entry = value; b_entry = true }
#define STORE_DEVICE(value) atomic { v_device = value; b_device = true }

active proctype memory()
{
end:
    do
    :: atomic { b_entry -> entry = v_entry; v_entry = 0; b_entry = false }
    :: atomic { b_device -> device = v_device; v_device = 0; b_device = false }
    od
}

active proctype daemon()
{
    byte serving;
    bool there, ok; /* `there`: the device slot has the block */
end:
    do
    :: !serving && STATE(flag) == HINTED -> /* publish */
        serving = GENERATION(flag);
        if
        :: !there -> STORE_ENTRY(HOST)
        :: there -> STORE_ENTRY(DEVICE) /* taken back before: the copy is complete, the release exchange is its SYNC copy */
        fi;
        /* SYNC flag: slot table and found word visible with the count (release exchange) */
        atomic { DRAINED -> assert(STATE(flag) == HINTED); flag = WORD(serving, READY) }
    :: serving && !there && STATE(flag) != RELEASED -> /* promote */
        STORE_DEVICE(serving);
        /* SYNC copy: the copy visible with the entry (fence) */
#ifndef M_PROMOTE_FENCE
        DRAINED;
#endif
        STORE_ENTRY(DEVICE);
        there = true
#ifdef M_PINNED
    :: serving && there -> STORE_ENTRY(HOST); STORE_DEVICE(OTHER); there = false
#endif
    :: serving && STATE(flag) == READY -> /* take back */
        atomic {
            if
            :: STATE(flag) == READY && DRAINED -> locked = true; ok = true
            :: STATE(flag) != READY
            fi
        };
        if
        :: ok && there -> STORE_DEVICE(OTHER); there = false
        :: true /* kept as long as nobody needs the device slot */
        fi;
        if
        :: ok -> atomic { flag = WORD(serving, HINTED); locked = false; serving = 0; ok = false }
        :: else
        fi
    :: !serving && there -> STORE_DEVICE(OTHER); there = false
    :: serving && STATE(flag) == RELEASED -> /* unpin, then free */
        if
        :: there -> STORE_DEVICE(OTHER)
        :: else
        fi;
        atomic { flag = WORD(serving, FREE); serving = 0; there = false }
    od
}

#define ACQUIRE e_entry = entry; e_device = device
#define FORGET atomic { e_entry = 0; e_device = 0; word = 0; slot = 0; value = 0 }
#define LOAD(value, now, then) if :: value = now :: value = then fi
#define READ_ENTRY LOAD(slot, entry, e_entry); assert(slot == HOST || slot == DEVICE)

/* Nobody else makes a transition out of CLAIMED. */
#define LEAVE_CLAIM(state) atomic { assert(flag == WORD(generation, CLAIMED)); flag = WORD(generation, state) }

active proctype engine()
{
    byte generation, word, slot, value;
    do
    :: generation == GENERATIONS -> break
    :: else ->
        atomic { STATE(flag) == FREE -> generation++; flag = WORD(generation, HINTED) };
poll:
        /* SYNC flag: slot table and found word visible with the count (acquire load) */
        atomic { STATE(flag) == READY -> word = flag; ACQUIRE };
#ifdef M_CLAIM_FIRST
        READ_ENTRY;
#endif
        atomic {
            !locked ->
            if
            :: flag == word -> flag = WORD(generation, CLAIMED)
            :: else -> FORGET; goto poll
            fi
        };
        /* SYNC claim: entry and claim cross (fence) */
#ifndef M_CLAIM_FENCE
        atomic { true -> ACQUIRE };
#endif
#ifndef M_CLAIM_FIRST
        READ_ENTRY;
#endif
        /* SYNC copy: the copy visible with the entry (fence) */
#ifndef M_READ_FENCE
        atomic { true -> ACQUIRE };
#endif
        if
        :: slot == DEVICE -> LOAD(value, device, e_device); assert(value == generation)
        :: else
        fi;
        if
        :: true -> LEAVE_CLAIM(READY); FORGET; goto poll
        :: true -> LEAVE_CLAIM(RELEASED)
        fi;
        FORGET
    od;
    STATE(flag) == FREE /* it always comes back */
}
